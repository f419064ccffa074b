"""llgtrt's own files, llgtrt.json5 above all: read, checked, and turned into settings of ours."""
