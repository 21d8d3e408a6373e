"""Which plans fit, which is fastest, why the others lost. Exhaustive over every legal plan, vectorised."""
