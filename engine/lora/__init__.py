"""Adapters of one base model: LoRA in PEFT's format."""
