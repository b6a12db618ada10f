"""Next-word prediction on chats."""
