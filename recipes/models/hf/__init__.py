"""How do our weights become a Hugging Face checkpoint, and the other way round? Knows no architecture."""
