"""The model: where it comes from, the computation of its log-probabilities, and its export."""
