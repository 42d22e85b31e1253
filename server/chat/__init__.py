"""`dspark-chat`: a conversation in the terminal with any dspark server. Needs no torch."""
