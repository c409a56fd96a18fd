"""KV that leaves a PREFILL request and arrives at a REMOTE one."""
