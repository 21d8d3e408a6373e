"""A described cluster on one machine: real processes behind shaped links, on shares of the cores. What `meshwright
emulate` stands on."""
