"""Llama: RMSNorm, rotary positions, grouped-query attention, gated MLP, optional tied head."""
