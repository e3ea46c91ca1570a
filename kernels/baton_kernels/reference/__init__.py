"""Every operation again in plain torch, unpaged and in float64: what the kernels are tested against."""
