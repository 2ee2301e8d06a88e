"""One call: whether it may be made, its result, and what of that a model is shown or can read later."""
