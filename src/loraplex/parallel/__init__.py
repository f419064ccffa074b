"""An engine of several ranks: who starts them, what they are sent, and how they end."""
