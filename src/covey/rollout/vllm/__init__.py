"""The engine on vLLM. `library` alone imports vllm, inside its functions."""
