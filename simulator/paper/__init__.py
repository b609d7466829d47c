"""The evaluation of the paper that this product builds on, run anew with the product's own policies."""
