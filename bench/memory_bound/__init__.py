"""The benches norm, activation, rope, dropout, cross_entropy, route, weighted_activation and combine: kernels that
multiply no matrices."""
