"""Blocks of KV outside of the process: in files of this machine, which outlive it, or in a store that workers share."""
