"""Every architecture against transformers: logits by way of greedy ids, chunked and batched over fragmented block tables; plain
torch, and the compiled kernels at every width of vectors."""

from __future__ import annotations

import random

import pytest
import torch

from diptych.common.compiled import ALL_LANES


def prompts_of(lengths, seed=3):
    rng = random.Random(seed)
    return [tuple(rng.randrange(320) for _ in range(n)) for n in lengths]


def test_ragged_batch_equals_transformers(variant, greedy_ids):
    prompts = prompts_of([1, 8, 17, 40])
    for prompt, out in zip(prompts, variant.driver().generate(prompts, 8), strict=True):
        ids, gap, _ = greedy_ids(variant.model, prompt, out)
        assert gap > 1e-4, "the random model has a tie: pick another seed"
        assert out == ids


@pytest.mark.parametrize("chunk", [1, 8, 11])
def test_chunked_prefill_equals_transformers(variant, greedy_ids, chunk):
    [prompt] = prompts_of([37])
    [out] = variant.driver().generate([prompt], 4, chunk=chunk)
    assert out == greedy_ids(variant.model, prompt, out)[0]


def test_logits_equal_transformers(variant):
    [prompt] = prompts_of([29])
    driver = variant.driver()
    seen = []
    forward = driver.runner._decoder.forward
    driver.runner._decoder.forward = lambda *a: seen.append(forward(*a)) or seen[-1]
    driver.prefill(prompt, driver.table(29), chunk=10)
    with torch.inference_mode():
        expected = variant.model(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(seen[-1][0], expected, atol=2e-4, rtol=1e-4)


def test_kv_does_not_depend_on_chunks(variant):
    [prompt] = prompts_of([37])
    driver = variant.driver()
    kv = []
    for chunk in (1, 5, 8, 37):
        table = driver.table(40)
        driver.prefill(prompt, table, chunk=chunk)
        blocks = driver.runner.pool.tensor[table].permute(1, 2, 0, 3, 4, 5)
        kv.append(blocks.flatten(2, 3)[:, :, :37])
    scale = kv[0].abs().max().item()
    for other in kv[1:]:
        assert (other - kv[0]).abs().max().item() <= 1e-5 * max(1.0, scale)


def test_prefill_and_decode_mix_in_a_step(variant, greedy_ids):
    prompts = prompts_of([9, 30, 2])
    driver = variant.driver()
    tables = [driver.table(len(p) + 4) for p in prompts]
    first = driver.prefill(prompts[0], tables[0], chunk=100)
    driver.runner.execute([driver.seq(prompts[1][:20], 0, tables[1], sample=False)])
    result = driver.runner.execute(
        [
            driver.seq(prompts[1][20:], 20, tables[1]),
            driver.seq([first], 9, tables[0], index=1),
            driver.seq(prompts[2], 0, tables[2]),
        ]
    )
    [[other], [second], [third]] = result.token_ids
    guesses = [first, second], [other], [third]
    assert list(guesses) == [greedy_ids(variant.model, p, guess)[0] for p, guess in zip(prompts, guesses, strict=True)]
    assert not result.bad_rows


def paris(folder):
    """The prompt, and the ids of the answer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    return prompt, tokenizer.encode("The capital of France is Paris.")


def knows_paris(driver, folder):
    prompt, answer = paris(folder)
    [ids] = driver.generate([prompt], len(answer) + 1)
    assert ids == [*answer, driver.runner.eos_token_ids[0]]


def test_real_model_knows_paris(real_model_dir, driver_of):
    """With what serves here by default."""
    knows_paris(driver_of(real_model_dir, num_blocks=8, block_size=16), real_model_dir)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", ALL_LANES)
def test_real_model_knows_paris_at_every_width(real_model_dir, driver_of, set_lanes, lanes):
    set_lanes(lanes)
    knows_paris(driver_of(real_model_dir, num_blocks=8, block_size=16, backend="native"), real_model_dir)
