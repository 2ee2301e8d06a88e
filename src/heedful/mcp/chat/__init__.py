"""A chat with tools: turns, what the model is told and asked, and the receipt of it."""
