//! `ebbtide migrate`: installs or upgrades the schema, and exits.

use anyhow::{Context, bail};
use tokio_util::sync::CancellationToken;

use super::database;
use crate::config::Config;
use crate::db::migrate;

pub(super) async fn run(config: Config, stop: CancellationToken) -> anyhow::Result<()> {
    let Some(opened) = database::open(&config.database, &stop).await? else { bail!("interrupted") };
    let outcome = migrate::migrate(&opened.direct).await;
    let shown = opened.shown.clone();
    opened.close().await;
    let installed = outcome.context("the schema could not be installed")?;
    if installed.newer_present {
        println!("{shown}: a newer release is installed; nothing changed");
    } else if installed.tables + installed.procedures == 0 {
        println!("{shown}: already up to date");
    } else {
        println!("{shown}: {} table and {} function files applied", installed.tables, installed.procedures);
    }
    Ok(())
}
