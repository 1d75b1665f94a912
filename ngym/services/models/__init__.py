"""Model servers: API dialects, streams, token capture and stored responses."""
