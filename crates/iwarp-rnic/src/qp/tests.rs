//! Tests of the queue pair.
