"""The parts decoder layers are made of; each owns its weights and takes what else it needs."""
