//! vramp-cuda
