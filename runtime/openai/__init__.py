"""OpenAI's requests and answers, whatever carries them."""
