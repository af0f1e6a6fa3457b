"""Streams of every kind while services are killed, frozen, restarted and scaled: nothing of them may change."""
