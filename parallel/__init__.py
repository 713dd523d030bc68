"""How does a wrapped weight, or a token, travel between ranks?

Knows "a tensor around `_data`" and process groups; knows nothing about FP8, recipes or converters.
"""
