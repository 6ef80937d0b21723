//! The format, byte by byte, and everything a damaged blob may hold.

use super::*;

/// A reproducible stream of numbers (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

struct Owned {
    trace_id: Option<Uuid>,
    transaction_id: String,
    producer: Option<String>,
    is_encrypted: bool,
    payload: Vec<u8>,
}

impl Owned {
    fn random(random: &mut Random) -> Self {
        let text = |random: &mut Random, max| "é".repeat(usize::try_from(random.below(max)).expect("small"));
        Self {
            trace_id: (random.below(2) == 0).then(|| Uuid::from_u128(u128::from(random.next()))),
            transaction_id: text(random, 40),
            producer: (random.below(2) == 0).then(|| text(random, 9)),
            is_encrypted: random.below(2) == 0,
            payload: (0..random.below(300)).map(|_| random.next().to_le_bytes()[0]).collect(),
        }
    }

    fn frame(&self) -> Frame<'_> {
        Frame {
            message_id: new_message_id(),
            trace_id: self.trace_id,
            transaction_id: &self.transaction_id,
            producer: self.producer.as_deref(),
            is_encrypted: self.is_encrypted,
            payload: &self.payload,
        }
    }
}

fn compressed(plain: &[u8]) -> Vec<u8> {
    zstd::bulk::compress(plain, 1).expect("compresses")
}

fn message(transaction_id: &str) -> Frame<'_> {
    Frame {
        message_id: new_message_id(),
        trace_id: None,
        transaction_id,
        producer: None,
        is_encrypted: false,
        payload: b"null",
    }
}

#[test]
fn what_is_packed_is_unpacked() {
    let mut random = Random(7);
    let mut packer = Packer::new(3);
    for round in 0..200 {
        let owned: Vec<Owned> = (0..=random.below(30)).map(|_| Owned::random(&mut random)).collect();
        let frames: Vec<Frame<'_>> = owned.iter().map(Owned::frame).collect();
        let packed = packer.pack(frames.iter().copied()).expect("fits");
        let segment = Segment::unpack(&packed.blob).expect("unpacks");
        assert_eq!(segment.frames().collect::<Vec<_>>(), frames, "round {round}");
        assert_eq!(segment.frame(frames.len()), None);
        assert_eq!(usize::try_from(packed.count).expect("positive"), frames.len());
        let hashes: Vec<u8> = frames.iter().flat_map(|frame| hash(frame.transaction_id)).collect();
        assert_eq!(packed.hashes, hashes, "position k of the hashes is frame k");
    }
}

#[test]
fn the_layout_is_fixed() {
    let frame = Frame {
        message_id: Uuid::from_u128(0x0102_0304_0506_7008_890A_0B0C_0D0E_0F10),
        trace_id: Some(Uuid::from_u128(u128::MAX)),
        transaction_id: "tx",
        producer: Some("me"),
        is_encrypted: true,
        payload: b"{}",
    };
    let packed = Packer::new(3).pack([frame]).expect("fits");
    let plain = decompress(&packed.blob).expect("one zstd frame");
    let mut expected = vec![43, 0, 0, 0, 7, 1, 2, 3, 4, 5, 6, 0x70, 8, 0x89, 10, 11, 12, 13, 14, 15, 16];
    expected.extend([0xFF; 16]);
    expected.extend([2, 0, b't', b'x', 2, 0, b'm', b'e', b'{', b'}']);
    assert_eq!(plain, expected);
}

#[test]
fn a_hash_is_xxh3_128_big_endian() {
    assert_eq!(hash(""), 0x99AA_06D3_0147_98D8_6001_C324_468D_497F_u128.to_be_bytes());
    assert_ne!(hash("a"), hash("b"));
}

#[test]
fn the_longest_transaction_id_survives() {
    let id = "x".repeat(usize::from(u16::MAX));
    let packed = Packer::new(3).pack([message(&id), message("y")]).expect("fits");
    let segment = Segment::unpack(&packed.blob).expect("unpacks");
    assert_eq!(segment.frame(0).map(|frame| frame.transaction_id.len()), Some(65_535));
    assert_eq!(segment.frame(1).map(|frame| frame.transaction_id), Some("y"));
}

#[test]
fn message_ids_sort_in_the_order_they_were_made() {
    let ids: Vec<String> = (0..10_000).map(|_| new_message_id().to_string()).collect();
    assert!(ids.is_sorted_by(|a, b| a < b), "as text too");
}

#[test]
fn a_blob_cut_anywhere_is_refused_or_shorter() {
    let plain = {
        let packed = Packer::new(3).pack([message("one"), message("two")]).expect("fits");
        decompress(&packed.blob).expect("unpacks")
    };
    let whole = plain.len() / 2;
    for cut in 0..plain.len() {
        let result = Segment::unpack(&compressed(&plain[..cut]));
        if cut % whole == 0 {
            assert_eq!(result.expect("a frame boundary").len(), cut / whole);
        } else {
            assert!(matches!(result, Err(Error::Corrupt(_))), "cut at {cut}");
        }
    }
}

#[test]
fn lengths_that_lie_are_refused() {
    let mut frame = vec![0_u8; LENGTH_BYTES + BODY_BYTES_MIN];
    frame[0] = 19;
    assert_eq!(Segment::unpack(&compressed(&frame)).expect("the smallest body").len(), 1);
    let short = {
        let mut f = frame.clone();
        f[0] = 18;
        f
    };
    let past_the_end = {
        let mut f = frame.clone();
        f[3] = 0xFF;
        f
    };
    let text_overruns = {
        let mut f = frame.clone();
        f[21] = 1;
        f
    };
    let no_room_for_trace = {
        let mut f = frame.clone();
        f[4] = HAS_TRACE;
        f
    };
    let not_utf8 = {
        let mut f = frame.clone();
        f[0] = 20;
        f[21] = 1;
        f.push(0xFF);
        f
    };
    for damaged in [short, past_the_end, text_overruns, no_room_for_trace, not_utf8] {
        assert!(matches!(Segment::unpack(&compressed(&damaged)), Err(Error::Corrupt(_))), "{damaged:?}");
    }
    assert!(matches!(Segment::unpack(b"not zstd"), Err(Error::Corrupt(_))));
}

#[test]
fn random_damage_never_panics() {
    let mut random = Random(11);
    let owned: Vec<Owned> = (0..20).map(|_| Owned::random(&mut random)).collect();
    let packed = Packer::new(3).pack(owned.iter().map(Owned::frame)).expect("fits");
    let plain = decompress(&packed.blob).expect("unpacks");
    for _ in 0..2_000 {
        let mut damaged = plain.clone();
        let at = usize::try_from(random.below(damaged.len() as u64)).expect("small");
        damaged[at] = random.next().to_le_bytes()[0];
        if let Ok(segment) = Segment::unpack(&compressed(&damaged)) {
            assert_eq!(segment.frames().len(), segment.len());
        }
        let mut blob = packed.blob.clone();
        let at = usize::try_from(random.below(blob.len() as u64)).expect("small");
        blob[at] ^= 1 << random.below(8);
        let _ = Segment::unpack(&blob).map(|segment| segment.len());
    }
}

#[test]
fn a_large_segment_survives_and_a_claimed_size_is_not_allocated() {
    let payload = vec![b' '; 9 << 20];
    let packed = Packer::new(1).pack([Frame { payload: &payload, ..message("big") }]).expect("fits");
    let segment = Segment::unpack(&packed.blob).expect("unpacks");
    assert_eq!(segment.frame(0).expect("one").payload, payload);
    // A header that claims 2^62 bytes, and no data behind it.
    let mut lie = vec![0x28, 0xB5, 0x2F, 0xFD, 0xE0];
    lie.extend((1_u64 << 62).to_le_bytes());
    assert!(matches!(Segment::unpack(&lie), Err(Error::Corrupt(_))));
}
