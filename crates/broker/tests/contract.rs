//! `sql/contract.txt` lists every function in `queen`: what other releases and tools may call.

mod support;

use support::Database;

/// Set to anything, the file is rewritten instead of compared.
const REWRITE: &str = "EBBTIDE_WRITE_CONTRACT";

#[tokio::test]
async fn the_functions_are_those_of_the_contract() {
    let database = Database::create().await;
    let client = database.client().await;
    let query = "select format('%s(%s) returns %s', p.oid::regproc, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid))
        from pg_proc p where p.pronamespace = 'queen'::regnamespace order by 1";
    let rows = client.query(query, &[]).await.expect("the catalogue answers");
    let found: String = rows.iter().map(|row| row.get::<_, String>(0) + "\n").collect();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/sql/contract.txt");
    if std::env::var_os(REWRITE).is_some() {
        std::fs::write(path, &found).expect("the contract can be written");
    }
    let contract = std::fs::read_to_string(path).expect("the contract can be read");
    assert_eq!(contract, found, "run with {REWRITE}=1 to accept the change");
}
