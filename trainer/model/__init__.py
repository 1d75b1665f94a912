"""The network, and what it computes for the tokens that it is trained on."""
