//! Many RNICs over a simulated TCP, from one seed.
