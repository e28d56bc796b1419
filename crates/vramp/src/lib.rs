//! vramp
