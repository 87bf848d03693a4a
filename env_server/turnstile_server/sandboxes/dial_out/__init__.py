"""Links that sandboxes dial: for backends elsewhere that give no byte stream to what runs in them."""
