"""What is computed, in which precision, and how is a model switched to it?

`registry` finds converters by name, `fp8_grouped_experts` switches the routed experts of a model, `backends` compute.
Importing this package imports nothing: `python -m converters` must list converters even where one of them is broken.
"""
