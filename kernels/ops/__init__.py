"""Each op's signature and its plain torch reference: its meaning, its documentation and its test oracle."""
