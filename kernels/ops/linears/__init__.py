"""Linears: plain, in the formats of quantised weights, and what adapters add to them."""
