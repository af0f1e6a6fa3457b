"""What a terminal shows: tables, streamed text, figures."""
