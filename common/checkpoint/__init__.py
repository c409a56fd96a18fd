"""Content of a checkpoint's files: hashes, manifest, the weights' fingerprint."""
