"""What differs between kinds of models: an encoder, running states, windows, support of trees."""
