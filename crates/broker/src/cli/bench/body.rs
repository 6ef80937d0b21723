//! Push requests that are built once and then only patched: fresh ids and numbers, same length.

use std::io::Write;

use super::client;

/// What takes the place of a message's number: fixed width, so that patching moves nothing.
const NUMBER_DIGITS: usize = 12;
const ID_CHARS: usize = 36;
const LANE_CHARS: usize = 6;
const WORDS: &[&str] = &[
    "harbour", "invoice", "retry", "parcel", "amber", "quartz", "ledger", "window", "signal", "cobalt", "branch",
    "orchid", "meter", "valley", "socket", "timber",
];

/// The transaction id of message `number`: looks random, is unique, and can be checked on arrival.
pub(super) fn transaction_id(seed: u64, number: u64) -> [u8; ID_CHARS] {
    let high = mix(seed ^ number);
    let low = mix(high ^ number.rotate_left(32));
    let mut id = [0; ID_CHARS];
    let (a, b, c) = (high >> 32, (high >> 16) & 0xffff, high & 0xffff);
    write!(&mut id[..], "{a:08x}-{b:04x}-{c:04x}-{:04x}-{:012x}", low >> 48, low & 0xffff_ffff_ffff)
        .expect("five groups of hex digits fill an id");
    id
}

/// splitmix64.
pub(super) fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The name of partition `index`.
pub(super) fn lane(index: usize) -> String {
    format!("p{index:05}")
}

/// A payload of about `bytes` bytes whose `n` is `number`.
pub(super) fn payload(bytes: usize, number: u64, salt: u64) -> String {
    let (a, b) = (mix(salt), mix(salt ^ 0x5555));
    let mut text = format!(
        r#"{{"n":"{number:012}","order":"{a:016x}","customer":{{"id":{},"city":"{}"}},"amount":{}.{:02},"note":""#,
        b % 1_000_000,
        WORDS[(b >> 32) as usize % WORDS.len()],
        a % 10_000,
        b % 100
    );
    let mut step = salt;
    while text.len() + 2 < bytes {
        step = mix(step);
        text.push_str(WORDS[step as usize % WORDS.len()]);
        text.push(if step >> 63 == 0 { ' ' } else { '-' });
    }
    text.truncate(text.len().min(bytes.max(64) - 2));
    text.push_str("\"}");
    text
}

/// One push request to one partition.
pub(super) struct PushRequest {
    bytes: Vec<u8>,
    /// Where each message's partition, number and id stand in `bytes`.
    places: Vec<[usize; 3]>,
    seed: u64,
}

impl PushRequest {
    pub(super) fn new(queue: &str, batch: usize, payload_bytes: usize, seed: u64, salt: u64) -> Self {
        let mut body = b"{\"items\":[".to_vec();
        let mut places = Vec::with_capacity(batch);
        for at in 0..batch {
            if at != 0 {
                body.push(b',');
            }
            body.extend_from_slice(format!(r#"{{"queue":"{queue}","partition":""#).as_bytes());
            let lane_at = body.len();
            body.extend_from_slice(lane(0).as_bytes());
            body.extend_from_slice(b"\",\"payload\":");
            let number_at = body.len() + br#"{"n":""#.len();
            body.extend_from_slice(payload(payload_bytes, 0, mix(salt ^ at as u64)).as_bytes());
            body.extend_from_slice(b",\"transactionId\":\"");
            places.push([lane_at, number_at, body.len()]);
            body.extend_from_slice(&transaction_id(seed, 0));
            body.extend_from_slice(b"\"}");
        }
        body.extend_from_slice(b"]}");
        let bytes = client::request("POST", "/api/v1/push", &body);
        let head_bytes = bytes.len() - body.len();
        places.iter_mut().flatten().for_each(|place| *place += head_bytes);
        Self { bytes, places, seed }
    }

    /// The request for messages `first..first + batch` into partition `index`.
    pub(super) fn patched(&mut self, first: u64, index: usize) -> &[u8] {
        let lane = lane(index);
        for (number, [lane_at, number_at, id_at]) in (first..).zip(&self.places) {
            self.bytes[*lane_at..][..LANE_CHARS].copy_from_slice(lane.as_bytes());
            write!(&mut self.bytes[*number_at..][..NUMBER_DIGITS], "{number:012}").expect("twelve digits are enough");
            self.bytes[*id_at..][..ID_CHARS].copy_from_slice(&transaction_id(self.seed, number));
        }
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payload_is_json_of_the_size_asked_for() {
        for bytes in [160, 256, 5000] {
            let text = payload(bytes, 7, 1);
            assert_eq!(text.len(), bytes);
            let read: serde_json::Value = serde_json::from_str(&text).unwrap();
            assert_eq!(read["n"], "000000000007");
        }
    }

    #[test]
    fn a_patched_request_holds_the_ids_and_numbers_it_was_given() {
        let mut request = PushRequest::new("q", 3, 256, 7, 1);
        let length = request.patched(0, 0).len();
        let bytes = request.patched(999_999_999_990, 42);
        assert_eq!(bytes.len(), length);
        let text = std::str::from_utf8(bytes).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.ends_with(&format!("content-length: {}", body.len())), "{head}");
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        let items = body["items"].as_array().unwrap();
        assert_eq!(items.len(), 3);
        for (number, item) in (999_999_999_990..).zip(items) {
            assert_eq!(item["partition"], "p00042");
            assert_eq!(item["payload"]["n"], format!("{number:012}"));
            let id = transaction_id(7, number);
            assert_eq!(item["transactionId"], std::str::from_utf8(&id).unwrap());
        }
    }
}
