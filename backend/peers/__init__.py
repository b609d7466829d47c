"""How gateways and llumlets prove to each other that they are of one fleet."""
