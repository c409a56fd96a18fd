"""Values of `--kv-encryption`. Settings import this; encryption.py has the code."""

OFF = "off"
CIPHERS = ("aes-gcm", "chacha20-poly1305")
MODES = (OFF, *CIPHERS)
