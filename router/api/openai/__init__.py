"""The OpenAI API's forms: bodies of requests, answers whole and streamed, errors."""
