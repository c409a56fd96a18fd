"""What a model is: for each family one file that turns config.json into a description. Pure: no kernel, no device, no torch."""
