"""The benches norm, activation, rope, dropout and cross_entropy: kernels that multiply no matrices."""
