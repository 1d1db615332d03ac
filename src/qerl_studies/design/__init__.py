"""What study.yaml asks for, its sessions, and the gates that tell whether it could show anything."""
