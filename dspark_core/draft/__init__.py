"""The DSpark draft: DFlash backbone, sequential heads, confidence head."""
