"""What training will cost, from the config alone, before anything runs: ``python -m launch.plan``.

step         what each rank holds: layers, slices of parameters, optimizer groups, buckets
activations  what a layer keeps between forward and backward
memory       bytes per rank
traffic      bytes and calls of each collective in a step
__main__     the command, which prints these, the operations (`model.flops`) and the bubble as tables
"""
