"""Writes quantized checkpoints from plain ones: `diptych quantize`.

rounding, gptq, smoothing    the arithmetic, pure: tensors in, tensors out
settings                     what a user chooses, and the quantization_config that says so
text                         calibration and held-out text as token ids
blocks                       a plain checkpoint block by block, over calibration tokens
methods                      one block's linear layers by each method
folder                       what is written
run                          all of it, with perplexity before and after
"""
