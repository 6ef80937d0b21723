//! Payloads as clients pack them.

use std::io::Read;

use crate::error::Error;

/// Longest payload of a timer, packed and unpacked.
pub const BYTES_MAX: usize = 1 << 20;

/// What a zstd frame holds, if that is no more than [`BYTES_MAX`].
///
/// # Errors
/// [`Error::Invalid`] if it is no zstd, [`Error::TooLarge`] if more comes out.
pub fn unpacked(packed: &[u8]) -> Result<Vec<u8>, Error> {
    let not_zstd = |error: std::io::Error| Error::invalid("payload", format!("does not unpack with zstd: {error}"));
    let mut plain = Vec::new();
    let decoder = zstd::Decoder::with_buffer(packed).map_err(not_zstd)?;
    decoder.take(BYTES_MAX as u64 + 1).read_to_end(&mut plain).map_err(not_zstd)?;
    if BYTES_MAX < plain.len() {
        return Err(too_large("once it is unpacked"));
    }
    Ok(plain)
}

/// # Errors
/// [`Error::TooLarge`] if `payload` is longer than [`BYTES_MAX`].
pub fn checked_length(payload: &[u8]) -> Result<(), Error> {
    if BYTES_MAX < payload.len() { Err(too_large("once it is decoded")) } else { Ok(()) }
}

fn too_large(when: &str) -> Error {
    Error::TooLarge(format!("payload: must have at most {BYTES_MAX} bytes {when}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_unpacks_to_too_much_is_not_unpacked() {
        let packed = |bytes: usize| zstd::encode_all(vec![b'1'; bytes].as_slice(), 3).expect("packs");
        assert_eq!(unpacked(&packed(BYTES_MAX)).expect("fits").len(), BYTES_MAX);
        assert!(matches!(unpacked(&packed(BYTES_MAX + 1)), Err(Error::TooLarge(_))));
        assert!(matches!(unpacked(&packed(64 << 20)), Err(Error::TooLarge(_))));
        assert!(matches!(unpacked(b"{}"), Err(Error::Invalid { .. })));
        assert!(unpacked(&packed(1000)[..10]).is_err(), "cut off");
    }
}
