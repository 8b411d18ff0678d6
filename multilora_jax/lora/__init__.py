"""LoRA adapters on the host: PEFT folders, their checks, their page-shaped form and the registry of names."""
