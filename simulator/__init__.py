"""The product's own policies over modelled engines, in virtual time."""
