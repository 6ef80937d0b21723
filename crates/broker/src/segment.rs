//! Frames ⇄ blob: how the messages of one segment are stored, and nothing else.
//!
//! A blob is every frame of the segment, one after the other, compressed once. A frame, with all
//! integers little-endian:
//!
//! ```text
//! body length u32 │ flags u8 │ message id 16 │ [trace id 16] │ u16 + transaction id │ [u16 + producer] │ payload
//! ```

use std::cell::RefCell;
use std::io::Read;

use uuid::Uuid;
use xxhash_rust::xxh3::xxh3_128;
use zstd::bulk::{Compressor, Decompressor};

use crate::error::Error;
pub use crate::id::HASH_BYTES;

/// Largest segment before compression; a blob that unpacks to more is refused.
pub const PLAIN_BYTES_MAX: usize = 1 << 30;

const HAS_TRACE: u8 = 1;
const HAS_PRODUCER: u8 = 2;
const IS_ENCRYPTED: u8 = 4;
const LENGTH_BYTES: usize = 4;
/// Flags, message id and the length of the transaction id.
const BODY_BYTES_MIN: usize = 1 + 16 + 2;
/// Up to here a blob's own claim of its size is believed and allocated in one piece; beyond it the
/// memory grows only as bytes really come out.
const BELIEVED_BYTES_MAX: u64 = 8 << 20;

/// One message, borrowed from a request or from an unpacked segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    pub message_id: Uuid,
    pub trace_id: Option<Uuid>,
    /// At most 65,535 bytes: its length travels as a `u16`.
    pub transaction_id: &'a str,
    /// Who pushed it, at most 65,535 bytes.
    pub producer: Option<&'a str>,
    /// Whether the payload is an encryption envelope.
    pub is_encrypted: bool,
    /// JSON exactly as it was sent.
    pub payload: &'a [u8],
}

/// A new message id. Ids made by one process sort in the order they were made, so frames whose ids
/// are made in frame order sort in offset order.
pub fn new_message_id() -> Uuid {
    Uuid::now_v7()
}

/// What the sidecar keeps of a transaction id: XXH3-128, big-endian.
pub fn hash(transaction_id: &str) -> [u8; HASH_BYTES] {
    xxh3_128(transaction_id.as_bytes()).to_be_bytes()
}

/// A segment ready to be stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packed {
    pub blob: Vec<u8>,
    /// One hash a frame, in frame order.
    pub hashes: Vec<u8>,
    pub count: i32,
}

/// Packs segments, one after the other, with one compression context.
pub struct Packer {
    compressor: Compressor<'static>,
    /// For segments too small to repay the making of entropy tables.
    small: Compressor<'static>,
    plain: Vec<u8>,
}

/// Up to this size a segment is compressed at [`SMALL_LEVEL`], which finds repetitions and codes no entropy.
const SMALL_BYTES_MAX: usize = 1024;
const SMALL_LEVEL: i32 = -1;

/// Scratch memory that a packer keeps between segments.
const SCRATCH_BYTES_KEPT: usize = 1 << 20;

impl Packer {
    /// `level` is zstd's, 1 to 19; it holds for segments of more than a kibibyte.
    pub fn new(level: i32) -> Self {
        let compressor = |level| Compressor::new(level).expect("the level is in range and the context is allocated");
        Self { compressor: compressor(level), small: compressor(SMALL_LEVEL), plain: Vec::new() }
    }

    /// Packs `frames`, of which there is at least one.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if they are larger than a segment can be.
    pub fn pack<'a>(&mut self, frames: impl IntoIterator<Item = Frame<'a>>) -> Result<Packed, Error> {
        self.plain.clear();
        let mut hashes = Vec::new();
        for frame in frames {
            put(&mut self.plain, &frame)?;
            hashes.extend_from_slice(&hash(frame.transaction_id));
        }
        assert!(!hashes.is_empty(), "a segment holds at least one frame");
        let compressor = if self.plain.len() <= SMALL_BYTES_MAX { &mut self.small } else { &mut self.compressor };
        let blob = compressor.compress(&self.plain).expect("the output is sized for the worst case");
        if self.plain.capacity() > SCRATCH_BYTES_KEPT {
            self.plain = Vec::new();
        }
        let count = i32::try_from(hashes.len() / HASH_BYTES).expect("fewer frames than bytes");
        Ok(Packed { blob, hashes, count })
    }
}

fn put(plain: &mut Vec<u8>, frame: &Frame<'_>) -> Result<(), Error> {
    let transaction_len = u16::try_from(frame.transaction_id.len()).expect("checked where the id was parsed");
    let body_len = body_len(frame);
    if plain.len() + LENGTH_BYTES + body_len > PLAIN_BYTES_MAX {
        return Err(Error::TooLarge(format!("the messages of one partition exceed {PLAIN_BYTES_MAX} bytes")));
    }
    plain.reserve(LENGTH_BYTES + body_len);
    let start = plain.len();
    plain.extend_from_slice(&u32::try_from(body_len).expect("less than the largest segment").to_le_bytes());
    let flag = |is_set: bool, bit: u8| if is_set { bit } else { 0 };
    let flags = flag(frame.trace_id.is_some(), HAS_TRACE)
        | flag(frame.producer.is_some(), HAS_PRODUCER)
        | flag(frame.is_encrypted, IS_ENCRYPTED);
    plain.push(flags);
    plain.extend_from_slice(frame.message_id.as_bytes());
    if let Some(trace_id) = frame.trace_id {
        plain.extend_from_slice(trace_id.as_bytes());
    }
    plain.extend_from_slice(&transaction_len.to_le_bytes());
    plain.extend_from_slice(frame.transaction_id.as_bytes());
    if let Some(producer) = frame.producer {
        let len = u16::try_from(producer.len()).expect("checked where the token was read");
        plain.extend_from_slice(&len.to_le_bytes());
        plain.extend_from_slice(producer.as_bytes());
    }
    plain.extend_from_slice(frame.payload);
    assert_eq!(plain.len() - start, LENGTH_BYTES + body_len, "the length field tells the truth");
    Ok(())
}

fn body_len(frame: &Frame<'_>) -> usize {
    BODY_BYTES_MIN
        + frame.trace_id.map_or(0, |_| 16)
        + frame.transaction_id.len()
        + frame.producer.map_or(0, |producer| 2 + producer.len())
        + frame.payload.len()
}

/// An unpacked segment. Its frames borrow from it.
#[derive(Debug)]
pub struct Segment {
    plain: Vec<u8>,
    /// Where each frame's body begins and ends.
    bodies: Vec<(usize, usize)>,
}

impl Segment {
    /// Unpacks a blob and checks every frame of it.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if a length overruns the buffer, text is not UTF-8, or the blob is no
    /// segment at all.
    pub fn unpack(blob: &[u8]) -> Result<Self, Error> {
        let plain = decompress(blob)?;
        let mut bodies = Vec::new();
        let mut at = 0;
        while at < plain.len() {
            let mut rest = Reader(&plain[at..]);
            let len = u32::from_le_bytes(rest.array()?) as usize;
            if len < BODY_BYTES_MIN {
                return Err(corrupt("a frame is shorter than its fixed fields"));
            }
            parse(rest.bytes(len)?)?;
            bodies.push((at + LENGTH_BYTES, at + LENGTH_BYTES + len));
            at += LENGTH_BYTES + len;
        }
        Ok(Self { plain, bodies })
    }

    /// How many messages there are.
    pub fn len(&self) -> usize {
        self.bodies.len()
    }

    pub fn is_empty(&self) -> bool {
        self.bodies.is_empty()
    }

    /// The message at `index`, counted from the segment's base offset.
    pub fn frame(&self, index: usize) -> Option<Frame<'_>> {
        let (start, end) = *self.bodies.get(index)?;
        Some(parse(&self.plain[start..end]).expect("checked when unpacked"))
    }

    /// Every message, in offset order.
    pub fn frames(&self) -> impl ExactSizeIterator<Item = Frame<'_>> {
        self.bodies.iter().map(|&(start, end)| parse(&self.plain[start..end]).expect("checked when unpacked"))
    }
}

fn decompress(blob: &[u8]) -> Result<Vec<u8>, Error> {
    thread_local! {
        static CONTEXT: RefCell<Decompressor<'static>> =
            RefCell::new(Decompressor::new().expect("the context is allocated"));
    }
    let is_one_frame = zstd::zstd_safe::find_frame_compressed_size(blob).is_ok_and(|len| len == blob.len());
    let claimed = zstd::zstd_safe::get_frame_content_size(blob).ok().flatten();
    match claimed {
        Some(len) if is_one_frame && len <= BELIEVED_BYTES_MAX => {
            let capacity = usize::try_from(len).expect("at most what is believed");
            CONTEXT
                .with_borrow_mut(|context| context.decompress(blob, capacity))
                .map_err(|error| corrupt(&error.to_string()))
        }
        _ => decompress_growing(blob),
    }
}

fn decompress_growing(blob: &[u8]) -> Result<Vec<u8>, Error> {
    let mut plain = Vec::new();
    let decoder = zstd::Decoder::with_buffer(blob).map_err(|error| corrupt(&error.to_string()))?;
    let limit = PLAIN_BYTES_MAX as u64 + 1;
    decoder.take(limit).read_to_end(&mut plain).map_err(|error| corrupt(&error.to_string()))?;
    if plain.len() > PLAIN_BYTES_MAX {
        return Err(corrupt("a segment unpacks to more than a segment can hold"));
    }
    Ok(plain)
}

fn parse(body: &[u8]) -> Result<Frame<'_>, Error> {
    let mut rest = Reader(body);
    let [flags] = rest.array()?;
    let message_id = Uuid::from_bytes(rest.array()?);
    let trace_id = if flags & HAS_TRACE == 0 { None } else { Some(Uuid::from_bytes(rest.array()?)) };
    let transaction_id = rest.text()?;
    let producer = if flags & HAS_PRODUCER == 0 { None } else { Some(rest.text()?) };
    let is_encrypted = flags & IS_ENCRYPTED != 0;
    Ok(Frame { message_id, trace_id, transaction_id, producer, is_encrypted, payload: rest.0 })
}

fn corrupt(what: &str) -> Error {
    Error::Corrupt(format!("segment: {what}"))
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, len: usize) -> Result<&'a [u8], Error> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or_else(|| corrupt("a length overruns the buffer"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        Ok(self.bytes(N)?.try_into().expect("exactly N bytes"))
    }

    fn text(&mut self) -> Result<&'a str, Error> {
        let len = u16::from_le_bytes(self.array()?);
        std::str::from_utf8(self.bytes(len.into())?).map_err(|_| corrupt("text is not UTF-8"))
    }
}

#[cfg(test)]
mod tests;
