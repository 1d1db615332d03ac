"""The axis `lora`: which layers get an adapter, of which rank."""
