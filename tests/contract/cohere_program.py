"""Calls a server with the client of Cohere, and prints what it read as JSON. Argument: the URL."""

import json
import sys

import cohere

client = cohere.ClientV2(api_key="none", base_url=sys.argv[1])
ranked = client.rerank(model="fr", query="q", documents=["one", "two"], top_n=2)
embedded = client.embed(
    model="echo",
    texts=["one", "two"],
    input_type="search_document",
    embedding_types=["float", "ubinary"],
    output_dimension=8,
)
try:
    client.embed(model="echo", texts=["a"], input_type="clustering", embedding_types=["int8"])
except cohere.BadRequestError as error:
    refused = str(error)
print(
    json.dumps(
        {
            "results": [
                {"index": each.index, "relevance_score": each.relevance_score}
                for each in ranked.results
            ],
            "float": embedded.embeddings.float_,
            "ubinary": embedded.embeddings.ubinary,
            "error": refused,
        }
    )
)
