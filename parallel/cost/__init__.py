"""What training costs, from the config alone.

    flops        operations per token
    plan         what each rank holds: layers, parameters, buckets
    activations  what a layer keeps between forward and backward
    memory       bytes per rank
    traffic      bytes and calls of each collective in a step

The first is exported here. The others know the pipeline's layout, which itself asks for operations, so import them by
their own names.
"""

from parallel.cost.flops import KDA_CHUNK, ForwardFlops, forward_flops, layer_flops, training_flops

__all__ = ["KDA_CHUNK", "ForwardFlops", "forward_flops", "layer_flops", "training_flops"]
