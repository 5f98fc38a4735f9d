"""What a model needs and does on devices that need not be there: memory, arithmetic, traffic, modelled time."""
